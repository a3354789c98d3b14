// Placeholder
#pragma once
