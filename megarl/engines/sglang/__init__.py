"""The SGLang engine: its processes, its arguments, and how weights come into it."""
