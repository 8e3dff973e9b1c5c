// Visible tiles of several query heads in turn: the tiles of a KV head's group.
#pragma once

#include "tile.cuh"

// Iterates over the visible tiles of one or more query heads: heads first … end − 1 in turn.
struct HeadTileIterator {
    u32 b, tile, h, end;
    TileIterator tiles;

    METHOD void begin(const Attention& a, u32 of_b, u32 of_tile, u32 first_head, u32 end_head) {
        b = of_b;
        tile = of_tile;
        h = first_head;
        end = end_head;
        tiles = {0, 0, 0};
        skip_empty_heads(a);
    }
    METHOD void skip_empty_heads(const Attention& a) {
        for (; h < end; ++h) {
            tiles.begin(a, b, h, tile);
            if (tiles.more()) return;
        }
    }
    METHOD bool more() const { return h < end; }
    METHOD TileEntry entry(const Attention& a) const { return tiles.entry(a); }
    METHOD void next(const Attention& a) {
        tiles.next(a);
        if (tiles.more()) return;
        ++h;
        skip_empty_heads(a);
    }
};
