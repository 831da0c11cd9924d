"""The published ways to store a tensor, beside integers and fp8 in groups."""
