// The backend of ggml: one device, tensors in ggml's own CPU buffers, FLASH_ATTN_EXT only. ggml
// finds ggml_backend_init in the library that GGML_BACKEND_PATH names.
#include "attention.hpp"

#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml-impl.h>

#include <cstring>
#include <exception>
#include <string>

namespace {

using ggml_annulus::Attention;

constexpr char NAME[] = "ANNULUS";
ggml_guid GUID = {0x4d, 0x9b, 0x1e, 0x60, 0x2a, 0xc7, 0x47, 0x35,
                  0x9f, 0x08, 0xd3, 0x5e, 0x71, 0xbc, 0x0a, 0xe6};

bool is_view(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW ||
         op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

Attention &attention(ggml_backend_t backend) { return *static_cast<Attention *>(backend->context); }

void set_threads(ggml_backend_t backend, int threads) { attention(backend).set_threads(threads); }

// A stream of graphs.

const char *backend_name(ggml_backend_t) { return NAME; }

void backend_free(ggml_backend_t backend) {
  delete &attention(backend);
  delete backend;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph *graph) {
  for (int index = 0; index < graph->n_nodes; index++) {
    ggml_tensor *node = graph->nodes[index];
    if (is_view(node->op) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;
    try {
      attention(backend).compute(node);
    } catch (const std::exception &error) {
      GGML_LOG_ERROR("%s: %s: %s\n", NAME, node->name, error.what());
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

// The device.

const char *device_name(ggml_backend_dev_t) { return NAME; }

const char *device_description(ggml_backend_dev_t) {
  static const std::string text = std::string("attention by annulus ") + annulus_version();
  return text.c_str();
}

// It has no memory of its own.
void device_memory(ggml_backend_dev_t, size_t *free, size_t *total) { *free = *total = 0; }

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_properties(ggml_backend_dev_t device, ggml_backend_dev_props *properties) {
  properties->name = device_name(device);
  properties->description = device_description(device);
  properties->type = device_type(device);
  device_memory(device, &properties->memory_free, &properties->memory_total);
  properties->caps = {};
  properties->caps.buffer_from_host_ptr = true;
}

ggml_backend_t device_open(ggml_backend_dev_t device, const char *) {
  ggml_backend_i functions{};
  functions.get_name = backend_name;
  functions.free = backend_free;
  functions.graph_compute = compute;
  return new ggml_backend{&GUID, functions, device, new Attention};
}

ggml_backend_buffer_type_t device_buffers(ggml_backend_dev_t) {
  return ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t device_buffer(ggml_backend_dev_t, void *data, size_t size, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, size);
}

bool supports(ggml_backend_dev_t, const ggml_tensor *node) {
  if (is_view(node->op)) return true;
  return node->op == GGML_OP_FLASH_ATTN_EXT && !ggml_annulus::refusal(node);
}

bool supports_buffers(ggml_backend_dev_t, ggml_backend_buffer_type_t buffers) {
  return ggml_backend_buft_is_host(buffers);
}

// The registry.

const char *registry_name(ggml_backend_reg_t) { return NAME; }

size_t device_count(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t device_at(ggml_backend_reg_t registry, size_t) {
  static ggml_backend_device device = [registry] {
    ggml_backend_device_i functions{};
    functions.get_name = device_name;
    functions.get_description = device_description;
    functions.get_memory = device_memory;
    functions.get_type = device_type;
    functions.get_props = device_properties;
    functions.init_backend = device_open;
    functions.get_buffer_type = device_buffers;
    functions.buffer_from_host_ptr = device_buffer;
    functions.supports_op = supports;
    functions.supports_buft = supports_buffers;
    return ggml_backend_device{functions, registry, nullptr};
  }();
  return &device;
}

void *function(ggml_backend_reg_t, const char *name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0)
    return reinterpret_cast<void *>(set_threads);
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  static ggml_backend_reg registry = {
      GGML_BACKEND_API_VERSION, {registry_name, device_count, device_at, function}, nullptr};
  return &registry;
}
