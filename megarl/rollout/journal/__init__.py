"""The rollout journal: finished groups on disk, which a resumed run reads and does not generate again."""
