"""Model folders in Hugging Face format: read and write boxes of tensors in safetensors files."""
