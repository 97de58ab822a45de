"""HTTP code that every room's routes share."""
