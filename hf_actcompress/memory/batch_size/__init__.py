"""The largest batch that trains on this device: `find` tries, `search` says what to try next, `report` shows it."""
