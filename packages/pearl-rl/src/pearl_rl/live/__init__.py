"""Looking at a run while it goes on, and operating it: reads its folder, acts through its control server."""
