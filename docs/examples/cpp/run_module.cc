// Runs a TorchScript module whose parameters lie in the shared memory of the cache.
#include <ATen/ATen.h>

#include <exception>
#include <iostream>
#include <modelcache/torch.hpp>
#include <string>

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::cerr << "usage: run_module PATH INPUT_WIDTH\n";
    return 2;
  }
  auto client = modelcache::Client::Connect().ValueOrThrow();
  modelcache::TorchModel torch_model(client.Open(argv[1]).ValueOrThrow());
  torch::jit::Module module = torch_model.Module().ValueOrThrow();

  for (const auto& [name, bytes] : torch_model.ExtraFiles().ValueOrThrow()) {
    std::cout << "extra file " << name << ": " << bytes << '\n';
  }
  for (const auto& parameter : module.named_parameters()) {
    std::cout << parameter.name << ' ' << parameter.value.sizes() << '\n';
  }
  const at::Tensor output = module.forward({at::ones({1, std::stol(argv[2])})}).toTensor();
  std::cout << "output sum " << output.sum().item<double>() << '\n';
  return 0;
} catch (const std::exception& e) {
  std::cerr << "run_module: " << e.what() << '\n';
  return 1;
}
