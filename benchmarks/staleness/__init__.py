"""What training on samples of older policies costs in reward, with and without a correction."""
