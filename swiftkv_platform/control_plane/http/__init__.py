"""HTTP parts that every room's routes share."""
