"""What the recipes share: options, data, models, run state and the stock-beside-patched comparison."""
