"""Tools: what a request says of them, answers that call them, and the constraint by which calls are valid."""
