"""The largest batch that trains on this device.

`find` tries, `search` says what to try next, `longest` makes batches of a data set's longest samples, `report` shows it.
"""
