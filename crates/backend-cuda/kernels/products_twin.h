// Products of warpgroups on the host: begun by every lane, done when their group is waited for, from what registers and shared memory hold then.
// Part of warpgroup_twin.h.
#pragma once

DEVICE float from_bf16(u16 x);
DEVICE float from_f16(u16 x);

namespace emulated {
namespace {

inline u32 field(u64 description, u32 from) { return u32(description >> from & 0x3fff) << 4; }

// Element of an operand in shared memory. `y` counts rows of 128 bytes, `x` elements along them; the next 64 of these are `leading` further.
inline u16 element_of(Block& block, u64 description, u32 y, u32 x) {
    u32 at = field(description, 0) + y / 8 * field(description, 32) + y % 8 * 128 + x / 64 * field(description, 16) + x % 64 * 2;
    bool known = (description >> 49 & 7) == 0 && description >> 62 == SWIZZLE_128;
    if (!known || at + 2 > block.launch_bytes) {
        tell("a descriptor that is not known, or leaves shared memory");
        block.fault = true;
        return 0;
    }
    u16 element;
    std::memcpy(&element, block.units->base + swizzled_128(at), 2);
    return element;
}

inline Flying& flying_of(Lane& lane, const float* sums) {
    return *std::find_if(lane.flying.begin(), lane.flying.end(), [&](const Flying& one) { return one.at == sums; });
}

__attribute__((optimize("O3"))) inline void add_products(float (&sums)[16][128], const float (&left)[16][16], const float (&right)[16][128],
                                                         u32 columns) {
    for (u32 row = 0; row < 16; ++row)
        for (u32 k = 0; k < 16; ++k)
            for (u32 column = 0; column < columns; ++column) sums[row][column] += left[row][k] * right[k][column];
}

inline void do_product(Block& block, u32 warp, const Product& product) {
    auto widened = [&](u16 x) { return product.is_f16 ? from_f16(x) : from_bf16(x); };
    static thread_local float left[16][16], right[16][128], sums[16][128];
    bool from_registers = product.left[0] != nullptr;
    for (u32 k = 0; k < 16; ++k) {
        for (u32 column = 0; column < product.columns; ++column) {
            // in the product of two operands in shared memory, both are rows of the summed index
            u16 element = from_registers ? element_of(block, product.right, k, column) : element_of(block, product.right, column, k);
            right[k][column] = widened(element);
        }
        for (u32 row = 0; row < 16; ++row) {
            // register of a lane: row / 8, column / 8; its half: column mod 2
            u16 element = from_registers ? u16(product.left[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)] >> (16 * (k % 2)))
                                         : element_of(block, product.left_description, warp % 4 * 16 + row, k);
            left[row][k] = widened(element);
        }
    }
    auto each = [&](auto what) {
        for (u32 of = 0; of < WARP; ++of) {
            std::vector<float>& numbers = flying_of(block.units->lanes[warp * WARP + of], product.sums[of]).numbers;
            for (u32 e = 0; e < product.columns / 2; ++e) what(numbers[e], sums[of / 4 + 8 * (e / 2 % 2)][8 * (e / 4) + 2 * (of % 4) + e % 2]);
        }
    };
    each([&](float& number, float& sum) { sum = product.add ? number : 0.0f; });
    add_products(sums, left, right, product.columns);
    each([](float& number, float& sum) { number = sum; });
    for (u32 of = 0; of < WARP; ++of) {
        Lane& lane = block.units->lanes[warp * WARP + of];
        Flying& one = flying_of(lane, product.sums[of]);
        if (--one.products > 0) continue;
        std::copy(one.numbers.begin(), one.numbers.end(), one.at);
        lane.flying.erase(lane.flying.begin() + (&one - lane.flying.data()));
    }
}

// Everybody in the warp waits for all groups but the last so many: the products of the others are done.
inline void do_products(const Shown* shown) {
    Block& block = *current();
    u32 warp = block.thread / WARP;
    std::vector<Product>& products = block.units->products[warp];
    u32 open = u32(shown[0].words[0]), groups = block.units->lanes[warp * WARP].groups, count = 0;
    for (const Product& product : products) {
        if (product.group + open >= groups) break;
        if (product.lanes != WARP) {
            tell("a product that not all lanes have begun");
            block.fault = true;
        }
        if (block.fault) return;
        do_product(block, warp, product);
        ++count;
    }
    products.erase(products.begin(), products.begin() + count);
    block.units->done[warp] += count;
}

inline void multiply_later(float* sums, u32 count, const u32* left, u64 left_description, u64 right, bool add, bool is_f16) {
    Block& block = *current();
    Lane& lane = own_lane();
    u32 warp = block.thread / WARP;
    if (!lane.begun) fault("products without begin_products");
    auto known = std::find_if(lane.flying.begin(), lane.flying.end(), [&](const Flying& one) { return one.at == sums; });
    if (known == lane.flying.end()) {
        lane.flying.push_back({sums, std::vector<float>(sums, sums + count), 1});
        std::memset(sums, 0xff, count * sizeof *sums);
    } else {
        ++known->products;
    }
    std::vector<Product>& products = block.units->products[warp];
    u32 place = lane.issued++ - block.units->done[warp];
    if (place == products.size()) {
        Product product = {};
        product.left_description = left_description;
        product.right = right;
        product.columns = 2 * count;
        product.group = lane.groups;
        product.add = add;
        product.is_f16 = is_f16;
        products.push_back(product);
    }
    Product& product = products[place];
    // descriptors, shapes and groups are the warp's
    if (product.left_description != left_description || product.right != right || product.columns != 2 * count || product.add != add ||
        product.group != lane.groups)
        fault("a product whose lanes differ");
    product.sums[block.thread % WARP] = sums;
    product.left[block.thread % WARP] = left;
    ++product.lanes;
}

}  // namespace
}  // namespace emulated
