"""What published methods compute, in plain torch: a file for each function of theirs."""
