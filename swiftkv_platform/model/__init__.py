"""The SwiftKV transformation of Hugging Face decoders. Importing it registers the classes with the Auto classes."""

from swiftkv_platform.model.causal_lm import get_student_classes
from swiftkv_platform.model.conversion import convert, convert_checkpoint, load_dense
from swiftkv_platform.model.export import export, export_adapter

__all__ = ["convert", "convert_checkpoint", "export", "export_adapter", "get_student_classes", "load_dense"]
