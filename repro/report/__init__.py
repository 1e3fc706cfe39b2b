"""Reports: Markdown for people and pull requests, one self-contained HTML page with plots."""
