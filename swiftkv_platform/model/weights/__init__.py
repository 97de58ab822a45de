"""Reading and writing of model weights.

- `bases` resolves a name to a directory or hub id, and converts GGUF files.
- `checkpoint` opens safetensors files and reads tensors, or parts of them, one at a time.
- `quantization` reads quantized tensors as floats or integers.
- `loading` maps stored tensors to the names and shapes in memory, and checks them against the model.
- `lazy_student` reads a student's weights from its teacher's.
- `writing` makes model directories; `adapters` writes only the difference from a base model.
"""
