"""Rules of LMCache's second level without LMCache: keys of its objects, what is locked, results of tasks."""
