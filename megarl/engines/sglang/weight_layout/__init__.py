"""Weight layouts of SGLang engines, traced from SGLang's own `load_weights`."""
