"""Two or more endpoints, the same requests to each, in interleaved rounds: which is faster, and how sure is that?"""
