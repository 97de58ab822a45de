"""One run on a GPU: whether the engines agree with PyTorch, then the paper's figures 3 and 4 and table 5."""
