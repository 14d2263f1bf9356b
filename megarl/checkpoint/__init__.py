"""What a run keeps on disk so that it can go on: folders that are whole or not there, and who may use them."""
