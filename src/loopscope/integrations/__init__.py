"""Where loopscope meets a trainer."""
