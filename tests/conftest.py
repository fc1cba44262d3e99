"""Fixtures for all tests."""

from tests.support.redis_servers import job_id, redis_url, store_url, valkey_url

__all__ = ["job_id", "redis_url", "store_url", "valkey_url"]
