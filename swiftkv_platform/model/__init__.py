"""The SwiftKV transformation of Hugging Face decoders. Importing it registers the classes with the Auto classes."""

from swiftkv_platform.model.conversion import convert
from swiftkv_platform.model.families import FAMILIES, student_classes

__all__ = ["FAMILIES", "convert", "student_classes"]
