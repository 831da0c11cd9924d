"""The largest batch that trains on this device.

`find` tries, `search` says what to try next, `longest` makes batches of the longest samples, `report` shows it.
"""
