"""How the final answers of the policy and of the data are read and compared."""
