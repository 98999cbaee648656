"""What other rooms know of megatron-core: unstable names, groups, buckets, stored weights."""
