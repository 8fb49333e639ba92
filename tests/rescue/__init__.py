"""Tests of `yafsdp_cc.rescue`."""
