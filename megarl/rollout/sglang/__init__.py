"""The SGLang engine: its processes, its arguments, and the adaptations for running it on CPU."""
