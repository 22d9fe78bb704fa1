"""On a rank: the group it joins, the state that each run begins with, what it says."""
