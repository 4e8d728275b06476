"""Explorer pages in a headless Chromium."""
