"""HTML reports and model cards, from evaluation results. Each page is a single file that works offline."""
