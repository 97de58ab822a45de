"""Reports as pages: one HTML file that needs nothing but a browser. Torch-free; measures nothing."""
