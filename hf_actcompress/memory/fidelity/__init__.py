"""What a lossy setting costs: `gradient_error` measures it, `calibration` finds the bits that lose least."""
