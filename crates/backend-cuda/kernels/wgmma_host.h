// Host twin of wgmma (part of warpgroup_host.h). Every lane issues its part of a product, which is
// computed when its group is waited for. Hardware may read the operands at any time in between, so
// they are read at both ends, and a launch in which they differ fails.
#pragma once

DEVICE float from_bf16(u16 x);
DEVICE float from_f16(u16 x);

namespace emulated {
namespace {

inline u32 field(u64 descriptor, u32 from) { return u32(descriptor >> from & 0x3fff) << 4; }

// Reads eight elements (16 bytes, which the swizzle keeps together) of an operand in shared memory
// through its descriptor: `y` counts rows of 128 bytes, `x` elements along them, `leading` bytes to
// the next 64 elements.
inline void read_eight(Block& block, u64 descriptor, u32 y, u32 x, u16* to) {
    u32 at = field(descriptor, 0) + y / 8 * field(descriptor, 32) + y % 8 * 128 +
             x / 64 * field(descriptor, 16) + x % 64 * 2;
    bool supported = (descriptor >> 49 & 7) == 0 && descriptor >> 62 == SWIZZLE_128;
    if (!supported || at + 16 > block.dynamic_shared_bytes) {
        trace("wgmma: unsupported descriptor, or operand beyond shared memory");
        block.fault = true;
        return;
    }
    std::memcpy(to, block.dynamic_shared + swizzled_128(at), 16);
}

// Reads the operands of a product as they are now. Left: 64 rows of 16 dims, or the A fragments of
// all lanes. Right: `columns` rows of 16 (K-major), or 16 summed rows of `columns` elements.
inline void read_operands(Block& block, const Product& product, Operands& to) {
    if (product.left[0] == nullptr) {
        for (u32 row = 0; row < 64; ++row)
            for (u32 x = 0; x < 16; x += 8)
                read_eight(block, product.left_descriptor, row, x, to.left + 16 * row + x);
        for (u32 column = 0; column < product.columns; ++column)
            for (u32 x = 0; x < 16; x += 8)
                read_eight(block, product.right, column, x, to.right + 16 * column + x);
        return;
    }
    for (u32 lane = 0; lane < WARP; ++lane)
        std::memcpy(to.left + 8 * lane, product.left[lane], 16);
    for (u32 k = 0; k < 16; ++k)
        for (u32 column = 0; column < product.columns; column += 8)
            read_eight(block, product.right, k, column, to.right + product.columns * k + column);
}

inline PendingAcc& pending_of(Lane& lane, const float* acc) {
    return *std::find_if(lane.pending.begin(), lane.pending.end(),
                         [&](const PendingAcc& one) { return one.at == acc; });
}

// As the products of an mma, at once (primitives_host.h), but rounded to nearest: nothing promises
// that wgmma and mma round alike.
__attribute__((optimize("O3"))) inline void multiply_accumulate(
    float (&acc)[16][MOST_COLUMNS], const float (&left)[16][16],
    const float (&right)[16][MOST_COLUMNS], u32 columns) {
    for (u32 row = 0; row < 16; ++row) {
        double sums[MOST_COLUMNS];
        for (u32 column = 0; column < columns; ++column) sums[column] = acc[row][column];
        for (u32 k = 0; k < 16; ++k)
            for (u32 column = 0; column < columns; ++column)
                sums[column] += double(left[row][k]) * double(right[k][column]);
        for (u32 column = 0; column < columns; ++column) acc[row][column] = float(sums[column]);
    }
}

inline void complete_product(Block& block, u32 warp, const Product& product) {
    auto widened = [&](u16 x) { return product.form.is_f16 ? from_f16(x) : from_bf16(x); };
    static thread_local float left[16][16], right[16][MOST_COLUMNS], acc[16][MOST_COLUMNS];
    const bool from_registers = product.left[0] != nullptr;
    const Operands& issued = *product.operands;
    Operands now = {};
    read_operands(block, product, now);
    if (std::memcmp(&now, &issued, sizeof now) != 0) {
        trace("wgmma: an operand was overwritten before its group was waited for");
        block.fault = true;
        return;
    }
    auto left_at = [&](u32 row, u32 k) {
        // A fragment: lane 4·(row mod 8) + k mod 8 / 2, register row / 8 + 2·(k / 8), half k mod 2
        if (from_registers)
            return 8 * (row % 8 * 4 + k % 8 / 2) + 2 * (row / 8 + 2 * (k / 8)) + k % 2;
        return 16 * (warp % 4 * 16 + row) + k;
    };
    for (u32 k = 0; k < 16; ++k) {
        for (u32 column = 0; column < product.columns; ++column)
            right[k][column] = widened(issued.right[from_registers
                                                        ? product.columns * k + column
                                                        : 16 * column + k]);
        for (u32 row = 0; row < 16; ++row) left[row][k] = widened(issued.left[left_at(row, k)]);
    }
    auto each = [&](auto what) {
        for (u32 of = 0; of < WARP; ++of) {
            std::vector<float>& values =
                pending_of(block.async_units->lanes[warp * WARP + of], product.acc[of]).values;
            for (u32 e = 0; e < product.columns / 2; ++e)
                what(values[e], acc[of / 4 + 8 * (e / 2 % 2)][8 * (e / 4) + 2 * (of % 4) + e % 2]);
        }
    };
    each([&](float& value, float& sum) { sum = product.form.add ? value : 0.0f; });
    multiply_accumulate(acc, left, right, product.columns);
    each([](float& value, float& sum) { value = sum; });
    for (u32 of = 0; of < WARP; ++of) {
        Lane& lane = block.async_units->lanes[warp * WARP + of];
        PendingAcc& one = pending_of(lane, product.acc[of]);
        if (--one.products > 0) continue;
        std::copy(one.values.begin(), one.values.end(), one.at);
        lane.unpinned.push_back({one.at, true});
        lane.pending.erase(lane.pending.begin() + (&one - lane.pending.data()));
    }
    for (u32 of = 0; of < WARP && from_registers; ++of)
        block.async_units->lanes[warp * WARP + of].unpinned.push_back({product.left[of], false});
}

// fence_operand: the registers at `at` were pinned after the wait for their group.
inline void pin(const void* at) {
    std::vector<RegisterOperand>& all = own_lane().unpinned;
    all.erase(std::remove_if(all.begin(), all.end(),
                             [&](const RegisterOperand& one) { return one.at == at; }),
              all.end());
}

// Fails the launch if the registers at `at` belonged to an earlier product and were not pinned
// after the wait for it: the compiler may then move accesses to them before the wait.
inline void check_pinned(const Lane& lane, const void* at) {
    for (const RegisterOperand& one : lane.unpinned)
        if (one.at == at) fault("wgmma: registers without fence_operand after the wait");
}

// wgmma.wait_group for the whole warp: computes the products of all groups, except the last `open`.
inline void complete_products(const LaneWords* lane_words) {
    Block& block = *current();
    u32 warp = block.thread / WARP;
    std::vector<Product>& products = block.async_units->products[warp];
    u32 open = u32(lane_words[0].words[0]), groups = block.async_units->lanes[warp * WARP].groups,
        count = 0;
    for (const Product& product : products) {
        if (product.group + open >= groups) break;
        if (product.lanes != WARP) {
            trace("wgmma: not issued by all lanes");
            block.fault = true;
        }
        if (block.fault) return;
        complete_product(block, warp, product);
        if (block.fault) return;
        ++count;
    }
    products.erase(products.begin(), products.begin() + count);
    block.async_units->done[warp] += count;
}

// Fails the launch if the operands of a product differ between the warps of a warpgroup, of which
// hardware computes it once: shared memory was overwritten while a warp had yet to issue it.
inline void compare_warps(Block& block, u32 warp, u32 number, const Operands& operands) {
    auto& all = block.async_units->of_warpgroup[warp / (WARPGROUP / WARP)];
    auto first = std::find_if(all.begin(), all.end(), [&](const WarpgroupProduct& one) {
        return one.number == number;
    });
    if (first == all.end()) {
        all.push_back({operands, number, 1});
        return;
    }
    if (std::memcmp(&first->operands, &operands, sizeof operands) != 0)
        fault("wgmma: an operand was overwritten before all warps had issued the product");
    if (++first->warps == WARPGROUP / WARP) all.erase(first);
}

inline void issue_product(float* acc, u32 count, const u32* left, u64 left_descriptor, u64 right,
                          const ProductForm& form) {
    Block& block = *current();
    Lane& lane = own_lane();
    u32 warp = block.thread / WARP;
    if (!lane.wgmma_fenced) fault("wgmma without wgmma.fence");
    check_pinned(lane, acc);
    if (left) check_pinned(lane, left);
    auto pending_acc = std::find_if(lane.pending.begin(), lane.pending.end(),
                                    [&](const PendingAcc& one) { return one.at == acc; });
    if (pending_acc == lane.pending.end()) {
        lane.pending.push_back({acc, std::vector<float>(acc, acc + count), 1});
        std::memset(acc, 0xff, count * sizeof *acc);
    } else {
        ++pending_acc->products;
    }
    std::vector<Product>& products = block.async_units->products[warp];
    const u32 number = lane.issued++;
    u32 index = number - block.async_units->done[warp];
    if (index == products.size()) {
        Product product = {};
        product.left_descriptor = left_descriptor;
        product.right = right;
        product.columns = 2 * count;
        product.group = lane.groups;
        product.form = form;
        product.operands = std::make_unique<Operands>();
        products.push_back(std::move(product));
    }
    Product& product = products[index];
    // descriptors, shapes and groups are uniform over the warp
    if (product.left_descriptor != left_descriptor || product.right != right ||
        product.columns != 2 * count || product.form.add != form.add ||
        product.group != lane.groups)
        fault("wgmma: operands differ between lanes");
    product.acc[block.thread % WARP] = acc;
    product.left[block.thread % WARP] = left;
    // wgmma is issued by the whole warp at once: when its last lane arrives
    if (++product.lanes < WARP) return;
    read_operands(block, product, *product.operands);
    if (left == nullptr) compare_warps(block, warp, number, *product.operands);
}

}  // namespace
}  // namespace emulated
