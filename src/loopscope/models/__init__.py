"""Models that come with loopscope."""
