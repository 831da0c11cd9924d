"""The functions of published methods in plain torch, one file each."""
