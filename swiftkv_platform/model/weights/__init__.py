"""Weights of models: where they come from, and how they are read and written.

A name becomes a directory or a hub id (`bases`, which converts GGUF files). `checkpoint` alone opens safetensors files
and reads their tensors, or parts of them, one at a time; `quantization` reads quantized ones as floats or as integers,
and `loading` gives all of them by the names and shapes that they have in memory, checked against the model.
`lazy_student` reads a student's from its teacher's. Training, conversion, calibration, export and the engine read
through these. `writing` makes model directories, and `adapters` those that hold only the difference from a base.
"""
