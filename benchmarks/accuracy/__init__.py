"""Do two endpoints answer equally well? The same questions to both, compared pair by pair."""
