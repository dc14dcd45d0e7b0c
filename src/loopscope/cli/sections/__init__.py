"""The parts of `loopscope summary`, one per file; each turns a run into what rich prints, or into nothing."""
