"""The report of one sweep: markdown, one HTML file, figures and trials.csv."""
