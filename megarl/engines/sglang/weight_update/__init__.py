"""Weight updates of a running SGLang engine: the host's session and the loader in each TP rank."""
