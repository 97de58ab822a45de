"""Computations of an attempt, run in Ray tasks and Ray Train workers. Independent of the driver."""
