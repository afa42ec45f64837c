"""`kvarn convert`: plan → prove → validate → write."""
