"""A store of full blocks below the pool, in memory and on disk: what outlives eviction and restart."""
