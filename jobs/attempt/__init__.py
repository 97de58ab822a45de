"""An attempt's place in the object store: events, stop requests, checkpoints, prepared data, tracking files."""
