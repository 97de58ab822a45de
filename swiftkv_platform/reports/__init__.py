"""Reports as pages: each a single HTML file that works in a browser without network. Torch-free; measures nothing."""
