"""The weights of a model alone, as safetensors files."""
