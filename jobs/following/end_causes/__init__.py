"""Find out why an attempt ended: by scheduler and launcher, by a failed launch, by its verdict."""
