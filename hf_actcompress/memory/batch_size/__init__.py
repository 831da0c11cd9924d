"""The largest batch that trains on this device.

`find` runs the trials, `search` chooses the next size to try, `longest` makes batches of the longest samples, and
`report` holds the result.
"""
