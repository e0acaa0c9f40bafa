"""The life of a launcher: start, report, summary, export."""
